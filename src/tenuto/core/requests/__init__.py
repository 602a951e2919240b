"""What requests say: whose they are, what they hint at, which tool they call."""
