"""`tenuto bench`: a workload against a server, and the records of what came out."""
