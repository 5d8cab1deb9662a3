#include "fresh.hpp"

#include <cstring>

namespace kvist {

Fresh check_fresh(Sizes& sizes, nb::handle pool_object, const Layout& layout, std::int64_t layer,
                  nb::handle key_object, nb::handle value_object, nb::handle slots_object) {
    const Tensor pool("pool", pool_object), key("key", key_object), value("value", value_object);
    const Tensor slots("slots", slots_object);
    const Size T = sizes.symbol("T");
    sizes.shape("slots", slots, {T});
    sizes.type("slots", slots, Type::i64);
    sizes.contiguous("slots", slots, 1);
    sizes.shape("key", key, {T, Size(layout.heads), Size(layout.key_dim)});
    sizes.shape("value", value, {T, Size(layout.heads), Size(layout.value_dim)});
    sizes.contiguous("key", key, 1);
    sizes.contiguous("value", value, 1);
    layout.check_layer(sizes, layer);
    const std::int64_t blocks = layout.check_pool(sizes, pool);
    sizes.type("key", key, pool.type());
    sizes.type("value", value, pool.type());
    const auto* const slot_of = reinterpret_cast<const std::int64_t*>(slots.data());
    sizes.range("slots", slot_of, T.value(), 0, blocks * layout.block_size);
    const Element element = sizes.element("pool", pool);
    const std::int64_t bytes = element_bytes(element);
    return Fresh{pool.data() + layer * layout.layer_elements() * bytes,
                 element,
                 &layout,
                 key.data(),
                 value.data(),
                 key.stride(0) * bytes,
                 key.stride(1) * bytes,
                 value.stride(0) * bytes,
                 value.stride(1) * bytes,
                 slot_of,
                 T.value()};
}

// One head's K and V of one token.
void put(const Layout& layout, Element element, char* head, std::int64_t slot, const char* key, const char* value) {
    const std::int64_t bytes = element_bytes(element), key_dim = layout.key_dim, value_dim = layout.value_dim;
    char* const values = head + layout.block_size * key_dim * bytes;
    if (!layout.paired) {
        std::memcpy(head + slot * key_dim * bytes, key, static_cast<std::size_t>(key_dim * bytes));
        std::memcpy(values + slot * value_dim * bytes, value, static_cast<std::size_t>(value_dim * bytes));
        return;
    }
    // K [slots/16][Dk/2][16][2]: a pair of dims is one word. V [slots/2][Dv][2]: every other element.
    char* const key_at = head + slot / kTileSlots * kTileSlots * key_dim * 2 + slot % kTileSlots * 4;
    for (std::int64_t pair = 0; pair < key_dim / 2; ++pair) {
        std::memcpy(key_at + pair * kTileSlots * 4, key + pair * 4, 4);
    }
    char* const value_at = values + slot / 2 * value_dim * 4 + slot % 2 * 2;
    for (std::int64_t d = 0; d < value_dim; ++d) std::memcpy(value_at + d * 4, value + d * 2, 2);
}

void put_heads(const Fresh& fresh, std::int64_t token, std::int64_t first, std::int64_t last) {
    for (std::int64_t h = first; h < last; ++h) {
        put(*fresh.layout, fresh.element, head_of(fresh, token, h), fresh.slots[token] % fresh.layout->block_size,
            fresh.key + token * fresh.key_token + h * fresh.key_head,
            fresh.value + token * fresh.value_token + h * fresh.value_head);
    }
}

void expect_heads(const Fresh& fresh, std::int64_t token, std::int64_t first, std::int64_t last) {
#ifdef __GNUC__
    const Layout& layout = *fresh.layout;
    if (!layout.paired) return;
    const std::int64_t slot = fresh.slots[token] % layout.block_size;
    for (std::int64_t h = first; h < last; ++h) {
        const char* const head = head_of(fresh, token, h);
        const char* const key = head + slot / kTileSlots * kTileSlots * layout.key_dim * 2;
        const char* const value = head + (layout.block_size * layout.key_dim + slot / 2 * layout.value_dim * 2) * 2;
        for (std::int64_t pair = 0; pair < layout.key_dim / 2; ++pair) __builtin_prefetch(key + pair * 64, 1);
        for (std::int64_t d = 0; d < layout.value_dim; d += 16) __builtin_prefetch(value + d * 4, 1);
    }
#endif
}

}  // namespace kvist
