"""What this package stands on and what it is sent out as: pins, licences, archives."""
