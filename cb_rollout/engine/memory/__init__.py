"""Plan and measure memory: what a device has, what training takes, what the KV cache gets."""
