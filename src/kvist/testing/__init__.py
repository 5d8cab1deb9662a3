"""Contracts that every tier, format, policy and kernel must pass; shipped for yours as well."""
