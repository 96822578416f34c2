"""What a sweep says: ranks, tables, pictures, and whether one sweep is slower than another."""
