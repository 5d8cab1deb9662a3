"""The bytes: where blocks lie. Tiers keep no books."""
