"""The layouts of a question: the values of each axis, and which combinations are legal."""
