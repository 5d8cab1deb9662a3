"""The lab: plan, simulate, measure, diagnose."""
