"""From what is asked to the cases of a sweep: runs in full, with what is predicted of each."""
