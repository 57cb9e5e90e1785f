"""What users of the engine call."""
