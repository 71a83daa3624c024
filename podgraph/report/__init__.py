"""Memory versus coverage: what a set of buckets does for a workload, as data, figures and a page."""
