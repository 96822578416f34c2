"""What a sweep says: ranks, residuals, tables, pictures, and whether one sweep is slower than another. Standard library
alone: the explorer reads it too."""
