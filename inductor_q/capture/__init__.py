"""How each library's quantized weights appear: as module state and as nodes of a graph."""
