"""How engines find each other and what they say: messages, handshake, sessions. KV itself never goes this way."""
