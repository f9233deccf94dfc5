"""How bitsandbytes, PEFT and other libraries appear in a graph."""
