"""The layouts of a question: the values of each setting, and which combinations are legal."""
