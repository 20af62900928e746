"""What ``EnergyMeter`` is made of: phases, totals, ranks, overlap. Knows no Lightning."""
