"""Parts of `penteract bench`: its question, its tables, and the line that shows how far it is."""
