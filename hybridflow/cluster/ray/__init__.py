"""Ray: started for a run or attached to, watched, and asked for devices."""
