"""The idea itself: the policy interface, the driver, leases, fairness. Standard library only.

The version is here, and nowhere else.
"""

__version__ = "0.2.0"
