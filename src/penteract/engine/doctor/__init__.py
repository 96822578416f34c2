"""What a machine has, what is wrong with it for training, and what a run would use.

`probe` examines the machine and returns a value (`machine.HostReport`). The file of each area makes findings from that
value alone; `report` puts them together.
"""
