"""The decision: Recipe + Arch + Cluster -> Plan."""
