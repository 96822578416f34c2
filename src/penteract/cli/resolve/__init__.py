"""What the words of a command line become: a run's values, its folders, weights, and the ranks around this process."""
