"""GPUs, models, and how much KV cache they leave."""
