"""How many workers own a table: searched, by price, all and one; forecast beside measured."""
