"""What ``EnergyMeter`` is made of: phases, totals, ranks, overlap, files. Only ``trainer`` knows Lightning."""
