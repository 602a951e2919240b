"""What runs on servers with a real model."""
