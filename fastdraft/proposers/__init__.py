"""Draft sources: each proposes tokens and knows exactly how it drew them."""
