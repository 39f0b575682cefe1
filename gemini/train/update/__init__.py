"""Updates of chunks: tile by tile, in place, staged or streamed; in flight beside computing, or inside backward."""
