"""What the notebooks of the course call, a package for each lab: given parts, figures,
checks and stored measurements. `overlaplab` never imports it."""
