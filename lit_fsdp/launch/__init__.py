"""How a run gets onto machines: jobs of SLURM."""
