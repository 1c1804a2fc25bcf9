"""A plan as one HTML file that needs nothing else: pictures in SVG, tables, and no request to any network."""
