"""What a machine has, what is wrong with it for training, and what a run would use.

`probe` asks the machine and gives a value (`machine.HostReport`); the files of areas make findings of that value, and
never ask anything themselves; `report` puts them together.
"""
