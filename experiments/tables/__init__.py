"""Tables of the docs that a few simulations make."""
