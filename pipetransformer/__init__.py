"""PipeTransformer-next: elastic, freeze-aware training (the idea of arXiv 2102.03161)."""
