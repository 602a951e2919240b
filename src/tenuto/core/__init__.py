"""The core: the policy interface, the driver, leases, fairness. It imports only the standard library.

The version number is defined here.
"""

__version__ = "0.2.0"
