"""Links between the devices of a host: what collectives and messages take, alone and beside products."""
