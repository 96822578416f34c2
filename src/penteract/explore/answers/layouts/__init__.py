"""All layouts of a question: the search, other questions, and two layouts compared."""
