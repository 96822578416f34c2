"""The ops a program may use, and what each costs. No torch."""
