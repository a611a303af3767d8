"""How the server is: signs of life of its threads, health, counters and gauges, and the endpoint that shows them."""
