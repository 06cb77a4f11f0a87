"""From stored rows to a verdict: costs and acceptance joined, intervals, causes, best k, comparisons. No torch."""
