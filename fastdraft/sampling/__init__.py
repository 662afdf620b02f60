"""From logits to accepted tokens: pure functions over tensors."""
