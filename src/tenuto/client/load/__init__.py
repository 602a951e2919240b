"""`tenuto bench`: runs a workload against a server and records the results."""
