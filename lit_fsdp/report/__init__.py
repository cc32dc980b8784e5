"""Human-readable reports of runs and audits."""
