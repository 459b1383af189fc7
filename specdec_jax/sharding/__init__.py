"""Device meshes, and how the logical axes of arrays are split over them."""
