"""One rank among others: joining, the signed store, the roll call, its progress, failures, and requests to stop."""
