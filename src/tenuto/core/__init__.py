"""The idea itself: blocks, leases, policies and the driver. Standard library only; no engine, no clock."""
