"""The network of the hosts: interface, variables, addresses, who reaches whom."""
