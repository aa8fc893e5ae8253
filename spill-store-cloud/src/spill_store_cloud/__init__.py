"""The stores s3, gs and az: one client of the store contract (`store`) over a small module for each provider."""
