"""The codecs that durable brings, one module for each. durable.messages.codec says which of them is used."""
