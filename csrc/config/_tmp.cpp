namespace ds {}
