"""`hybridflow launch`: submission of a run to a cluster's scheduler."""
