"""Who owns which byte: the device pool, pinned staging, the arena plan and the KV blocks."""
