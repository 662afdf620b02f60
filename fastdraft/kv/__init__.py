"""The paged KV cache: who holds which block (pool, table; no torch) and the tensors behind them (cache)."""
