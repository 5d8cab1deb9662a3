"""What the lab found, as one HTML page that needs nothing else: one kind of content a file."""
